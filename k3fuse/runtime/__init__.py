"""From a bundle to tokens: plan data, weights, executors, slots. Knows nothing of the compiler."""
