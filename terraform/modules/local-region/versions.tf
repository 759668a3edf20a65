terraform {
  # Only the built-in terraform_data is used, so there is no provider to download.
  required_version = ">= 1.6"
}
