"""Other engines beside this one: each in an environment of its own, as a child process that speaks lines of JSON."""
