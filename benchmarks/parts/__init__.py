"""What the benchmarks are made of: workloads, training steps to compare, timing, and machine facts."""
