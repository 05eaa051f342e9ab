"""Words, options, errors and progress that every stage shares; it knows no stage."""
