"""Pages and pictures of stored searches: ``python -m autotune --report DIR``."""

from autotune.report.write import check_ready, write_report

__all__ = ["check_ready", "write_report"]
