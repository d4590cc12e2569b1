"""The documents are kept true: what they show is run."""
