"""Options, errors, records and progress bars shared by every stage. Imports none of the stages."""
