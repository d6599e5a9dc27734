-- A customer can place at most 10 orders in any hour, with any program that inserts orders. Run pgratelimit migrate up
-- first.

CREATE TABLE orders (
    id       bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    customer text NOT NULL,
    item     text NOT NULL
);

-- The trigger runs with the rights of the role that inserts, so that role needs EXECUTE on rate_limit_allow: GRANT
-- EXECUTE ON FUNCTION rate_limit_allow TO shop;
--
-- A refused INSERT or a rolled-back transaction takes nothing. From the INSERT until the end of the transaction, other
-- orders of the same customer wait. Transactions that insert for several customers can deadlock, unless all of them use
-- the same order of customers.
CREATE FUNCTION limit_orders()
RETURNS trigger
LANGUAGE plpgsql
AS $$
DECLARE
    answer record;
BEGIN
    SELECT * INTO answer FROM rate_limit_allow('orders', NEW.customer, 'log 10/1h', durable => true);
    IF NOT answer.allowed THEN
        RAISE EXCEPTION 'too many orders'
            USING ERRCODE = 'RL001', HINT = format('Order again in %s.', answer.retry_after);
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER limit_orders BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION limit_orders();
