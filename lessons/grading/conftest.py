import gc

# Python's garbage collector goes through all objects again and again, and torch has very many. Let
# it wait for more new ones. This takes a few seconds off the tests.
gc.set_threshold(100_000, 20, 100)


def pytest_collection_modifyitems(config, items):
    """Run the tests that wait for a notebook last, and all tests without capturing logs.

    The notebooks are run in the background, beside all other tests, those of test_model.py
    included.
    """
    # For each test, pytest's capturing of logs goes through all loggers, and torch has hundreds.
    logging_plugin = config.pluginmanager.get_plugin("logging-plugin")
    if logging_plugin:
        config.pluginmanager.unregister(logging_plugin)
    items.sort(key=lambda item: "notebook" in getattr(item, "originalname", ""))
