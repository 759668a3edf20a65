# Requests without a token may do nothing. The policy is empty on purpose and is attached to the anonymous token so
# that nobody takes its emptiness for an oversight.
