"""Training: what decides a run, what keeps it, and the run itself."""
