"""What the measurements share: servers, processes that read, figures and tables."""
