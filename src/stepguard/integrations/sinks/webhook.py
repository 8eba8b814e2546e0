"""Alerts by webhook, beside the loggers: `GuardConfig(sinks=(WebhookSink(url),))`."""

from stepguard.report.sinks import WebhookFailed, WebhookSink

__all__ = ["WebhookFailed", "WebhookSink"]
