"""Parts of the benchmarks: workloads, training steps to compare, timing, and machine facts."""
