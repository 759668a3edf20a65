# An instance of ${service}: registers itself and its sidecar, nothing else. No KV, no write on another service's
# name (and so no other service's certificate).

# Reading the intentions of the own service is what the agent does in a sidecar's name, over and over: denied, it
# fills the agent's log with an error per try (seen on 1.8).
service "${service}" {
  policy     = "write"
  intentions = "read"
}

service "${service}-sidecar-proxy" {
  policy     = "write"
  intentions = "deny"
}

# How many sleep on its device, of whatever service: beyond eight, one that is asleep goes cold by itself.
service_prefix "" {
  policy     = "read"
  intentions = "deny"
}

# The sidecar's alias check looks at the node it is on; the executor asks the agent who it is.
node_prefix "" { policy = "read" }

agent_prefix "" { policy = "read" }
