"""Names of OpenTelemetry's semantic conventions for generative AI, as of opentelemetry-semantic-conventions
0.66.

Law: names only. They are still in development and change, so they stand in this one file, and a test compares
them with the installed package (importing that costs an executor's start what it doesn't have).
"""

from __future__ import annotations

CHAT, COMPLETION = "chat", "text_completion"
"""Values of OPERATION_NAME."""
PROVIDER = "weir"

OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_STOP_SEQUENCES = "gen_ai.request.stop_sequences"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

ERROR_TYPE = "error.type"
STATUS_CODE = "http.response.status_code"
REQUEST_ID = "weir.request_id"
TENANT, REGION, STAGE, INSTANCE = "weir.tenant", "weir.region", "weir.stage", "weir.instance"
ENGINE = "weir.engine"
