output "ca_file" {
  description = "Certificates to trust when calling the ingress."
  value       = one(module.region[*].ca_file)
}

output "consul" {
  description = "Address of the region's Consul: HTTP API and UI."
  value       = one(module.region[*].consul)
}

output "ingress" {
  description = "Address of the region's ingress gateway."
  value       = one(module.region[*].ingress)
}

output "name" {
  description = "Name of the region, also the name of its Consul datacenter."
  value       = one(module.region[*].name)
}
