"""The HTTP door: dialects, prompts, admission, streaming, metering. See ARCHITECTURE.md."""
