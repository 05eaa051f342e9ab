"""The order of rows: permutations, samplings, plan, resuming, ranks. Pure arithmetic without I/O."""
