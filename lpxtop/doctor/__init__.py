"""`lpxtop doctor`: read-only checks of this host and of an endpoint; error texts explained.

`run` is the command without the command line: (what to print, exit code). `explain_error` reads an error text.
Must not change, start or reset anything.
"""

from lpxtop.doctor.examine import examine, run
from lpxtop.doctor.explain import explain_error
from lpxtop.doctor.output import report_json, report_markdown, report_text
from lpxtop.doctor.results import Report, Result

__all__ = ["Report", "Result", "examine", "explain_error", "report_json", "report_markdown", "report_text", "run"]
