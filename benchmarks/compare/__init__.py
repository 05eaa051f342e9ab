"""Every loader in one run: scenarios, the other tools, and the report of a run."""
