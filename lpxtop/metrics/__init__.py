"""What the numbers mean: definitions, distributions, the fold of events into state, its judgement."""
