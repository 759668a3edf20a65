"""Two engines of one model and a rule that says who answers (S14).

Law: never another model, never silently: each token names its engine, and `reason_of` names the rule. rules:
the decision, pure. rules_file: the rules from YAML. tally: how often and how long. engine: the Engine that
wraps both.
"""
