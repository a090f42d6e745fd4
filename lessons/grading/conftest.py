def pytest_collection_modifyitems(items):
    """Run the tests that wait for a notebook last.

    The notebooks are run in the background, beside all other tests, those of test_model.py
    included.
    """
    items.sort(key=lambda item: "notebook" in getattr(item, "originalname", ""))
