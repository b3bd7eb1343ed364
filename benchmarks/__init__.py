"""What torpor costs, in ratios of one run: ``make bench``, or ``python -m benchmarks --help``."""
