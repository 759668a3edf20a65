# An instance of ${service}: registers itself and its sidecar, nothing else. No KV, no other service's name
# (and so no other service's certificate).

service "${service}" {
  policy     = "write"
  intentions = "deny"
}

service "${service}-sidecar-proxy" {
  policy     = "write"
  intentions = "deny"
}

# The sidecar's alias check looks at the node it is on; the executor asks the agent who it is.
node_prefix "" { policy = "read" }

agent_prefix "" { policy = "read" }
