"""User code to `Graph`: tracing on fake tensors, random operations, clean-up passes."""
