"""Report: the page about a run, and minigen's twin in JavaScript."""
