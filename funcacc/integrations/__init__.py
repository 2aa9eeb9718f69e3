"""Trainers of other libraries on funcacc; `import funcacc` imports nothing of this."""
