"""What can be said about a dataset before training: its contents, the cost of an epoch, mixing, and advice on sizes."""
