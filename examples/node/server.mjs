// Answers ten requests a minute from each address.
//
//	npm install pg@8
//	DATABASE_URL=postgres://localhost/app PORT=8080 node server.mjs
import http from 'node:http';
import pg from 'pg';

const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL });

http.createServer(async (request, response) => {
  try {
    const { rows: [limit] } = await pool.query({
      name: 'limit', // prepared once for each connection
      text: 'SELECT allowed, retry_after_seconds FROM rate_limit_allow($1, $2, $3)',
      values: ['node', request.socket.remoteAddress, 'sliding 10/1m'],
    });
    if (!limit.allowed) {
      response.writeHead(429, { 'Retry-After': limit.retry_after_seconds }).end('too many requests');
      return;
    }
    response.end('hello');
  } catch {
    response.writeHead(503).end(); // nobody could decide
  }
}).listen(process.env.PORT);
