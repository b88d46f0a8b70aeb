"""A small MCP server: a shop's orders, over its standard input and output. `mcp_agent.py` starts it."""

from __future__ import annotations

from mcp.server import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("orders", log_level="ERROR")
ORDERS = {"7": {"item": "a lamp", "price": 40}, "8": {"item": "a chair", "price": 120}}


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def look_up(order: str) -> str:
    """Tell what an order is of."""
    found = ORDERS.get(order)
    return f"order {order} is {found['item']} for {found['price']}" if found else f"there is no order {order}"


@server.tool()
def refund(order: str) -> str:
    """Pay the price of an order back."""
    return f"{ORDERS[order]['price']} were paid back for order {order}"


if __name__ == "__main__":
    server.run()
