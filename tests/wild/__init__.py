"""Programs as people write them, run eagerly and lazily in the default configuration."""
