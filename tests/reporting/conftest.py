"""Fixtures of the reporting tests: a complete run with its report."""

from pathlib import Path

import pytest

from evisrag_jax.reporting.page import write_report
from tests.reporting.fake_run import make_run
from tests.reporting.html_page import Page


@pytest.fixture(scope="session")
def rl_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run folder with its report; tests must not change it."""
    run = make_run(tmp_path_factory.mktemp("runs") / "rs-grpo-mini")
    write_report(run)
    return run


@pytest.fixture(scope="session")
def rl_page(rl_run: Path) -> Page:
    """The report of that run."""
    return Page((rl_run / "report.html").read_text(encoding="utf-8"))
