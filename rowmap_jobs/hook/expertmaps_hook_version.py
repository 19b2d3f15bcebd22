"""Version of the hook, alone in a module so that the operator can read it without the rest."""

VERSION = "0.1.0"
