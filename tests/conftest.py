import tests.shapes  # noqa: F401  checks the shapes in the names of tensors
