"""From a run folder to one HTML file: ``reporting.page.write_report`` reads what a command left behind
(metrics, time line, rollouts, predictions, summary) and writes a self-contained ``report.html`` that
opens offline in any browser. Host code only: it reads files, never a model, and never imports jax.
"""
