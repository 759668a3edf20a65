# A person (or pipeline) that moves traffic and writes intentions: `weir traffic`, `weir intentions`, `weir status`.
# Leaves an audit entry; sees status and epochs but writes only the epoch of a change of its own.

node_prefix "" { policy = "read" }

agent_prefix "" { policy = "read" }

session_prefix "" { policy = "write" }

service_prefix "" {
  policy     = "read"
  intentions = "write"
}

key_prefix "config/traffic/" { policy = "write" }

key_prefix "status/" { policy = "read" }

key_prefix "status/epochs/" { policy = "write" }

key_prefix "audit/" { policy = "write" }

key_prefix "locks/" { policy = "write" }

key_prefix "drills/" { policy = "read" }
