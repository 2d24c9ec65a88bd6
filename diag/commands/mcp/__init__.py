"""`diag mcp`: the tools of diag for agents, over the Model Context Protocol."""
