"""Predictions of cases at full size (``--gpu-dry-run``): asked of workers, kept in a cache, compared with recorded ones."""
