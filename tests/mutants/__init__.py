"""Small bugs set into the code one at a time: which of them does no test see?"""
