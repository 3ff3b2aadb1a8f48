"""HTTP below the routes: connections, bodies, middleware, server-sent events, keys, traces."""
