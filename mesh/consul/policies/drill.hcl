# The drill runner: reads everything it judges, moves traffic when the scenario does, holds the drill lock, keeps
# the history. It may not change intentions, nor register or take away a service.

node_prefix "" { policy = "read" }

agent_prefix "" { policy = "read" }

session_prefix "" { policy = "write" }

service_prefix "" {
  policy     = "read"
  intentions = "read"
}

key_prefix "config/traffic/" { policy = "write" }

key_prefix "status/" { policy = "read" }

key_prefix "status/epochs/" { policy = "write" }

key_prefix "audit/" { policy = "write" }

key_prefix "locks/" { policy = "write" }

key_prefix "drills/" { policy = "write" }
