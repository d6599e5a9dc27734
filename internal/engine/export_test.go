package engine

// TripError returns the error that the trip of a request has ended with.
func (r *Request) TripError() error { return r.trip.err }
