"""The MCP server of mcp_tools.py: one tool, over standard input and output."""

from mcp.server.mcpserver import MCPServer

CAPITALS = {"France": "Paris", "Italy": "Rome", "Norway": "Oslo", "Peru": "Lima", "Ghana": "Accra"}
server = MCPServer("capitals")


@server.tool()
def capital(country: str) -> str:
    """Look up the capital of a country."""
    return CAPITALS.get(country, "unknown")


if __name__ == "__main__":
    server.run("stdio")
