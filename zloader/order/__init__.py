"""Which rows come when: permutations, samplings, plan, resume, ranks. Pure arithmetic, without I/O."""
