"""The gateway's configuration: one strict TOML file, every key with a default.

Flags override the environment, the environment overrides the file, the file overrides the defaults.
An unknown key, a wrong type or an impossible value is an error that names the file, the key, the
value and what is expected. `load_config` is the entry point.
"""

from gateway.config.checks import (
    ANY_NAME,
    Origin,
    check_web_address,
    is_model_name,
    parse_address,
)
from gateway.config.decoding import ConfigError
from gateway.config.loading import effective, load_config
from gateway.config.tables import (
    AdminConfig,
    BillingConfig,
    Config,
    EmbeddingsConfig,
    IdempotencyConfig,
    LimitsConfig,
    LogConfig,
    MetricsConfig,
    ModelSettings,
    ResponsesConfig,
    ServedModelSettings,
    ServerConfig,
    TenancyConfig,
    TracingConfig,
    WebhookConfig,
    WebhookEventType,
    WebhookFormat,
)
from gateway.config.web_addresses import format_address

__all__ = [
    "ANY_NAME",
    "AdminConfig",
    "BillingConfig",
    "Config",
    "ConfigError",
    "EmbeddingsConfig",
    "IdempotencyConfig",
    "LimitsConfig",
    "LogConfig",
    "MetricsConfig",
    "ModelSettings",
    "Origin",
    "ResponsesConfig",
    "ServedModelSettings",
    "ServerConfig",
    "TenancyConfig",
    "TracingConfig",
    "WebhookConfig",
    "WebhookEventType",
    "WebhookFormat",
    "check_web_address",
    "effective",
    "format_address",
    "is_model_name",
    "load_config",
    "parse_address",
]
