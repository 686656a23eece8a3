"""Text: from files and bytes to documents, tokens, contexts and targets."""
