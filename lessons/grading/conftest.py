def pytest_collection_modifyitems(items):
    """Notebooks run beside all other tests, test_model.py's too: what waits for them comes last."""
    items.sort(key=lambda item: "notebook" in getattr(item, "originalname", ""))
