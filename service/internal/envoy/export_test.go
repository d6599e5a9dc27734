package envoy

// LimitersOf returns how many limiters the server keeps.
func LimitersOf(s *Server) int {
	s.limiters.mu.RLock()
	defer s.limiters.mu.RUnlock()
	return len(s.limiters.kept)
}
