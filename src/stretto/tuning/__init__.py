"""Large batches without re-tuning: rules of scale, gradient noise, measured throughput, and the choice of a batch."""
