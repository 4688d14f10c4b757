"""Model pairs and prompts shared by the model tests; torch and transformers are loaded once."""

import pytest


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    """Depth 5, full attention in 2 and 4: no period. Untied head, windows of 112 px."""
    from tests.models.tiny import make_pair

    folder = tmp_path_factory.mktemp("untied")
    return make_pair(folder, depth=5, full=(2, 4), tied=False, seed=1)


@pytest.fixture(scope="session")
def tied(tmp_path_factory):
    """Depth 4, full attention in 1 and 3: period 2. Tied head, windows of 56 px."""
    from tests.models.tiny import make_pair

    folder = tmp_path_factory.mktemp("tied")
    return make_pair(folder, depth=4, full=(1, 3), tied=True, width=32, window=56, seed=2)


@pytest.fixture(scope="session", params=["untied", "tied"])
def pair(request):
    """Both pairs."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def rows(pair):
    """Three, two, one and no picture; grids ragged, exactly dividing, and below one window."""
    from tests.models.tiny import make_row

    return [
        make_row(pair, 11, (56, 56), (84, 140), (112, 112)),
        make_row(pair, 12, (140, 196), (112, 224)),
        make_row(pair, 13, (84, 56)),
        make_row(pair, 14, text=9),
    ]


@pytest.fixture(scope="session")
def batch(pair, rows):
    """The rows as one padded batch."""
    from tests.models.tiny import make_batch

    return make_batch(pair, rows)
