"""What report.py and compare.py are made of: the records of a run, their statistics, and the parts of the report."""
