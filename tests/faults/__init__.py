"""The fault campaign (`make test-faults`): whatever happens, nothing that was saved is lost."""
