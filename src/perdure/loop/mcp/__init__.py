"""MCP servers as toolsets, through the official `mcp` client, which is imported only when a server is started."""
