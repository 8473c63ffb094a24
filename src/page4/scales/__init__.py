"""K/V scales: measured over real requests, packed, laid over a checkpoint, verified."""
